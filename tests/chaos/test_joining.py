"""Clients that join a run after its server was killed in the middle of a round."""

from __future__ import annotations

import json
import signal

import fednet
from tests.processes import Federation, crashes, in_process

LISTS = [list(range(k, k + 20)) for k in range(0, 120, 20)]
TESTS = [[2 * k, 2 * k + 1] for k in range(6)]


def test_clients_join_after_a_kill_in_a_round_whose_replies_are_on_disk(tmp_path):
    file = tmp_path / "lists.json"

    def write(clients: int) -> None:
        file.write_text(json.dumps({"train": LISTS[:clients], "test": TESTS[:clients]}))

    # 2 of 4 clients a round, then 3 of 6. The server dies in round 2, with both replies on disk.
    shape = {
        "participation": 0.5,
        "seed": 3,
        "algorithm": "scaffold",
        "data": {"partition": {"scheme": "file", "path": str(file)}},
        "faults": crashes((2, "aggregating")),
    }
    more = {"clients": 6, "rounds": 4}
    write(4)
    with Federation(tmp_path / "killed", rounds=2, **shape) as fed:
        for ids in ("0-1", "2-3"):
            fed.client(ids, "--data", file)
        fed.server()
        assert fed.status() == -signal.SIGKILL
        write(6)
        fed.client("4-5", "--data", file)
        fed.server(resume=True, **more)
        fed.finish()
    fed.check(killed=1)
    (added,) = fed.events("clients_added")
    assert (added["round"], added["clients"]) == (1, [4, 5])
    # A reply of round 2 whose client is not in that round any more was sent in vain.
    reasons = {r["client"]: r["reason"] for r in fed.lines("wire.jsonl") if r.get("reason")}
    selected = fed.rounds()[1]["selected"]
    (client,) = [c for c, reason in reasons.items() if reason.startswith("clients joined")]
    assert client not in selected
    # The same, where the run ended with round 1.
    write(4)
    whole = in_process(tmp_path / "whole", **{**shape, "faults": {}, "rounds": 1})
    write(6)
    mapping = {**whole.mapping, **more}
    fednet.run(mapping, in_process=True, out=tmp_path / "whole", quiet=True, resume=True)
    assert fed.hashes() == whole.hashes()
