"""Builds what is uploaded to a package index: `.ci/release.py ADDRESS FOLDER`.

ADDRESS is that of the repository, such as https://example.org/fednet: the files of the commit are
expected at ADDRESS/blob/vVERSION/FILE. It gets into the metadata, and into the links of README.md,
which an index shows without the other files. FOLDER gets a wheel and an sdist of the last commit.
Needs the packages `build` and `twine`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
# What setuptools leaves out of an sdist by itself.
REST = "graft configs\ngraft deploy\ngraft docs\ngraft tests\ninclude *.md *.cff *.yml\n"


def linked(text: str, address: str, version: str) -> str:
    """Returns a page with links to the repository's files in place of relative ones."""

    def whole(link: re.Match[str]) -> str:
        image, words, file = link.groups()
        kind = "raw" if image else "blob"
        return f"{image}[{words}]({address}/{kind}/v{version}/{file})"

    return LINK.sub(whole, text)


def described(project: str, address: str) -> str:
    """Returns pyproject.toml with the repository's address."""
    urls = f'[project.urls]\nRepository = "{address}"\n'
    urls += f'Changelog = "{address}/blob/HEAD/CHANGELOG.md"\n\n'
    return project.replace("[project.scripts]", urls + "[project.scripts]", 1)


def build(repository: Path, address: str, folder: Path) -> None:
    def git(*words: object) -> bytes:
        return subprocess.run(
            ["git", *map(str, words)], cwd=repository, check=True, stdout=-1
        ).stdout

    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        git("archive", "HEAD", "-o", copy / "all.tar")
        with tarfile.open(copy / "all.tar") as whole:
            whole.extractall(copy, filter="data")
        (copy / "all.tar").unlink()
        found = re.search(r'__version__ = "(.+)"', (copy / "fednet" / "__init__.py").read_text())
        assert found, "fednet/__init__.py has no version"
        readme, project = copy / "README.md", copy / "pyproject.toml"
        readme.write_text(linked(readme.read_text(), address, found[1]))
        project.write_text(described(project.read_text(), address))
        (copy / "MANIFEST.in").write_text(REST)
        words = [sys.executable, "-m", "build", "--outdir", str(folder), str(copy)]
        subprocess.run(words, check=True)
    made = sorted(folder.glob(f"fednet-{found[1]}*"))
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], check=True
    )
    (wheel,) = (file for file in made if file.suffix == ".whl")
    missing = {*git("ls-files", "fednet").decode().split()} - {*zipfile.ZipFile(wheel).namelist()}
    if missing:
        sys.exit(f"{wheel} lacks {', '.join(sorted(missing))}; see package-data in pyproject.toml")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    build(Path(__file__).parents[1], sys.argv[1].rstrip("/"), Path(sys.argv[2]).absolute())
