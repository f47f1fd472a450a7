"""Draw into a file: no display, no pyplot, and the caller's matplotlib backend stays as it is."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlfreeze_ds.errors import RLFreezeError
from rlfreeze_ds.planning.atomic_write import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
"""The kinds of file that can be written."""

DOTS_PER_INCH = 150


def save_picture(
    path: str | Path, draw: Callable[[Axes], object], *, size: tuple[float, float] = (10.0, 4.0)
) -> None:
    """Write what ``draw`` puts on an Axes, as the kind of file that the suffix of ``path`` names.

    Args:
        path: ends in one of :data:`SUFFIXES`.
        draw: is called once, with the empty Axes.
        size: width and height, in inches.

    Raises:
        RLFreezeError: another suffix, matplotlib is missing, or the place cannot be written; an old file there stays as
            it was.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise RLFreezeError(
            f"cannot draw {path}: its suffix is {suffix!r}, must be one of {', '.join(SUFFIXES)}; name the file anew."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RLFreezeError(
            f"cannot draw {path}: matplotlib cannot be imported ({error}). Run `pip install matplotlib`, "
            "or install this package with its extra `viz`."
        ) from None
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:])
    write_bytes(path, buffer.getvalue())
