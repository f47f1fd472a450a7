import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.picture import DOTS_PER_INCH, save_picture


def draw(ax) -> None:
    ax.plot([0, 1], [0, 1])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "magic"), [("a.png", b"\x89PNG\r\n\x1a\n"), ("a.PNG", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF-")]
)
def test_the_suffix_names_the_kind(tmp_path: Path, name: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    save_picture(tmp_path / name, draw)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert names(tmp_path) == [name]


def test_the_size_is_in_inches(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_picture(tmp_path / "a.png", draw, size=(3.0, 2.0))
    assert struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24]) == (3 * DOTS_PER_INCH, 2 * DOTS_PER_INCH)


def test_matplotlib_is_left_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys, matplotlib; matplotlib.use('svg')\n"
        "from rlfreeze_ds.planning.picture import save_picture\n"
        "save_picture(sys.argv[1], lambda ax: ax.plot([0, 1]))\n"
        "assert matplotlib.get_backend() == 'svg' and 'matplotlib.pyplot' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.png")]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["a.jpg", "a", "png", ".png"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RLFreezeError, match=r"its suffix is '.*', must be one of \.png, \.svg, \.pdf"):
        save_picture(tmp_path / name, draw)
    assert names(tmp_path) == []


def test_a_missing_matplotlib_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RLFreezeError, match="matplotlib cannot be imported .* Run `pip install matplotlib`"):
        save_picture(tmp_path / "a.png", draw)
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["absent/a.png", "folder.png"])
def test_an_impossible_place_is_one_error(tmp_path: Path, place: str) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(RLFreezeError, match="cannot write .*Nothing was changed"):
        save_picture(tmp_path / place, draw)
    assert names(tmp_path) == ["folder.png"]


@pytest.mark.parametrize("where", ["draw", "rename"])
def test_a_failure_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if where == "rename":
        monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError if where == "draw" else RLFreezeError, match="No space left"):
        save_picture(path, fail if where == "draw" else draw)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.png"]
