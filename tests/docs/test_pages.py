from __future__ import annotations

import re
from pathlib import Path

import pytest

import fednet
from fednet.cli.main import main
from fednet.config.keys import DocumentedKey, keys, options
from fednet.records import FILES, Summary
from fednet.server.events import LOUD
from tests.docs import script

PACKAGE = Path(fednet.__file__).parent


@pytest.fixture(scope="module")
def pages():
    return script("pages")


def test_no_page_that_follows_from_the_code_is_out_of_date(pages):
    assert pages.stale() == [], "run python docs/pages.py"


def test_a_page_that_was_edited_by_hand_is_noticed(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "HERE", tmp_path)
    assert pages.stale() == list(pages.PAGES)


def test_every_key_has_its_type_default_unit_and_text():
    found = {k.path: k for k in keys()}
    assert len(found) > 80
    assert found["round.lost.silent"] == DocumentedKey(
        "round.lost.silent",
        "auto or a float > 0 or null",
        "auto",
        "s",
        "A client counts as lost after this time without a heartbeat, or bytes of a long message; "
        "null: never; auto: 10 s, or 300 s for fednet-server at an address beyond loopback.",
    )
    assert {"link.per_client.IDS.up_mbps", "faults.schedule[i].round", "evaluate.global"} <= {
        *found
    }
    assert found["schedule.mode"].default == "sync"  # a section, where faults.schedule is a list


@pytest.mark.parametrize(
    ("section", "some"),
    [
        ("algorithm", {"fedavg.weighting", "fedabc.m_p", "feddcplus.iterations"}),
        ("model", {"mlp.hidden", "resnet18_gn.gn_groups"}),
        ("data", {"synthetic.samples", "site.shape"}),
        ("data.partition", {"dirichlet.alpha", "shards.per_client"}),
        ("wire", {"topk.share", "int8.block", "dgc.clip"}),
    ],
)
def test_every_option_of_every_part_has_a_text(section, some):
    found = {f"{part}.{o.path}": o for part, own in options(section).items() for o in own}
    assert some <= {*found}
    assert [path for path, o in found.items() if not o.about] == []


@pytest.mark.usefixtures("readings")
def test_options_that_a_method_inherits_have_the_inherited_texts():
    found = options("algorithm")
    names = ("scaffold", "scaffold-niidbench")
    inherited, own = ({o.path: o for o in found[name]} for name in names)
    assert own["option"] == inherited["option"]
    assert (own["weighting"].default, inherited["weighting"].default) == ("samples", "uniform")
    assert own["weighting"].about == inherited["weighting"].about


def test_options_of_a_users_own_parts_are_listed_with_their_texts(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(
        "from fednet.algorithms.base import Algorithm, AlgorithmConfig\n"
        "from fednet.registry import algorithm\n"
        '@algorithm("own-method")\n'
        "class Own(Algorithm):\n"
        "    class Config(AlgorithmConfig):\n"
        "        mu: float = 0.5\n"
        '        """Strength of the pull."""\n'
        "from typing import Annotated\n"
        "from fednet.registry import dataset\n"
        '@dataset("own-data")\n'
        "def own(*, window: Annotated[int, 'Length of a window. [s]'] = 3): ...\n"
    )
    for part, said in (
        ("algorithm.own-method", "mu: a float; default 0.5\n    Strength of the pull.\n"),
        ("data.own-data", "window: a whole number; default 3 [s]\n    Length of a window.\n"),
    ):
        assert main(["list", "keys", part, "--load", str(file)]) == 0
        assert capsys.readouterr().out == said


def test_every_key_is_read_somewhere():
    """In the package's source, but for the lines that declare keys."""
    declares = PACKAGE / "config" / "schema.py"
    texts = [f.read_text(encoding="utf-8") for f in PACKAGE.rglob("*.py") if f != declares]
    source = "\n".join([*texts, *re.findall(r"self\..*", declares.read_text(encoding="utf-8"))])
    read = {name for pair in re.findall(r'\.(\w+)|"(\w+)"', source) for name in pair}
    names = {key.path: key.path.rpartition(".")[2] for key in keys()}
    names["evaluate.global"] = "global_"
    assert [path for path, name in names.items() if name not in read] == []


def test_every_variable_that_is_read_stands_on_the_page_of_commands():
    read = {
        name
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(r"\bFEDNET_[A-Z]+\b", file.read_text(encoding="utf-8"))
    }
    assert len(read) > 4
    page = (PACKAGE.parent / "docs" / "commands.md").read_text(encoding="utf-8")
    assert read - set(re.findall(r"^\| `(FEDNET_[A-Z]+)` \|", page, re.MULTILINE)) == set()


# -- what a run leaves
def written_events() -> set[str]:
    text = "".join(f.read_text(encoding="utf-8") for f in PACKAGE.rglob("*.py"))
    named = re.findall(r'(?:\.event|\._?note|\.tell|\bNote)\(\s*"([a-z_]+)"', text)
    chosen = re.findall(r'\._?note\(\s*"([a-z_]+)" if .*? else "([a-z_]+)"', text)
    return {*named, *LOUD, *(name for pair in chosen for name in pair)}


def test_every_field_and_event_of_a_runs_files_stands_on_its_page():
    page = (PACKAGE.parent / "docs" / "runs.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`([a-z0-9_]+)`", page))
    fields = {name for kind in (*FILES.values(), Summary) for name in kind.__struct_fields__}
    judged = {name for name in fields if re.match(r"(accuracy|correct|tested)_", name)}
    absent = fields - judged - {"correct_by_class", "details"} - said
    assert absent == set()
    assert {name.partition("_")[2] for name in judged - {"correct_by_class"}} - said == set()
    assert len(written_events()) > 20
    assert written_events() - said == set()


# -- the architecture page -------------------------------------------------------------------------
ARCHITECTURE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")


def absent(page: str) -> list[str]:
    """Files, folders and names in them that a page speaks of and that are not there. `NAME.py`
    and `mine.py` stand for files that a reader makes.
    """
    found = []
    for path in re.findall(r"`([a-z_][\w./]*(?:\.\w+|/))`", page):
        if path.endswith(("NAME.py", "mine.py")) or not re.search(r"\.(py|md|toml)$|/$", path):
            continue
        if not any((root / path).exists() for root in (PACKAGE, PACKAGE.parent)):
            found.append(path)
    for path, name in re.findall(r"`([\w/]+\.py)`,\s+`(\w+(?:\.\w+)?)`", page):
        file = PACKAGE / path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        kind, _, method = name.partition(".")
        here = rf"(class|def) {kind}\b" + (rf".*?\n    def {method}\b" if method else "")
        if not re.search(here, text, re.DOTALL):
            found.append(f"{path}: {name}")
    return found


def test_every_file_that_the_architecture_page_names_is_there():
    assert len(re.findall(r"`[a-z_]+/[\w/]+\.py`", ARCHITECTURE)) > 30
    assert absent(ARCHITECTURE) == []
    folders = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    table = ARCHITECTURE.partition("| folder |")[2].partition("\n\n")[0]
    assert folders - set(re.findall(r"`(\w+)`", table)) == set()


def test_a_file_or_a_name_that_moved_is_noticed():
    moved = "`server/nowhere.py`, `gone/`, `server/rounds.py`, `Rounds.shut`, and `mine.py`"
    assert absent(moved) == ["server/nowhere.py", "gone/", "server/rounds.py: Rounds.shut"]
    assert absent("`server/rounds.py`,\n  `Rounds.open`") == []
