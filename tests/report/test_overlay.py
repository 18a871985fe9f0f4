"""Pictures of the clients' local models are of the models that the run left."""

from __future__ import annotations

import numpy as np
import torch

import fednet
from fednet.report import open_run, overlay


def test_accuracy_by_class_is_that_of_each_clients_last_local_model(tmp_path):
    data = {
        "dataset": "synthetic",
        "samples": 200,
        "shape": [1, 8, 8],
        "classes": 4,
        "partition": {"scheme": "shards", "per_client": 1},
    }
    sets = {
        "algorithm": "fedabc",
        "data": data,
        "clients": 4,
        "participation": 1.0,
        "rounds": 2,
        "model": {"name": "mlp", "hidden": [16]},
        "train": {"lr": 0.1, "epochs": 3, "batch_size": 16},
    }
    run = open_run(fednet.run(None, set=sets, in_process=True, out=tmp_path).dir)
    clients, rates = overlay.local_accuracy(run)
    assert clients == [0, 1, 2, 3]
    assert rates.shape == (4, 4)
    held = run.counts
    # each client holds one class, and is best at it
    assert all(held[k].argmax() == rates[k].argmax() for k in clients)
    assert bool(np.isfinite(rates).all())
    path = overlay.draw_local(run, tmp_path / "local.png", "a title")
    assert path.stat().st_size > 1000
    assert torch.get_num_threads() >= 1


def test_a_run_without_local_models_has_no_picture(tmp_path):
    sets = {"rounds": 1, "model": "mlp", "data": {"dataset": "synthetic", "samples": 60}}
    run = open_run(fednet.run(None, set=sets, in_process=True, out=tmp_path).dir)
    for path in (run.dir / "personal").glob("*"):
        path.unlink()
    assert overlay.local_accuracy(run) is None
    assert overlay.draw_local(run, tmp_path / "none.png", "") is None
