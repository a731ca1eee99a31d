"""Measures a figure of a paper, draws it in the paper's form, and prints paper against measured.

    python scripts/reproduce.py apex/fig3 --cpu       # any machine, to see that it works
    python scripts/reproduce.py apex/fig6a --quick    # one GPU, a few minutes
    python scripts/reproduce.py apex/fig6a            # the paper's size
    python scripts/reproduce.py --list

Figures are the files experiments/<paper>/<figure>.yaml. Exit code 0: done; 1: a point failed or was
left out for lack of time; 2: the file is wrong. Ctrl-C and SIGTERM end the measurement, and what is
there by then is drawn. The last line printed is the result folder; `--copy-to` puts its small files
(figure.json, figure.yaml, figure.png, figure.txt) somewhere else as well.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

from swiftapex.core.errors import ConfigError
from swiftapex.figures.reproduce import TEXT, reproduce
from swiftapex.figures.spec import FigureConfig, load_figure

_SMALL = ("figure.json", "figure.yaml", "figure.png", TEXT)
_EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def figures() -> dict[str, Path]:
    """Every figure's file by its name."""
    return {
        path.relative_to(_EXPERIMENTS).with_suffix("").as_posix(): path
        for path in sorted(_EXPERIMENTS.glob("*/*.yaml"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", nargs="?", metavar="PAPER/FIGURE")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a few minutes on one GPU")
    size.add_argument("--cpu", action="store_true", help="on a CPU alone")
    parser.add_argument("--list", action="store_true", help="name all figures")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="put over the file's"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--copy-to", type=Path, metavar="DIR", help="of the small files")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # a job in the background ignores the latter
        signal.signal(number, signal.default_int_handler)
    known = figures()
    if options.list or options.figure is None:
        for name, path in known.items():
            print(f"{name:20} {load_figure(path).title}")
        return 0
    variant = "cpu" if options.cpu else "quick" if options.quick else None
    try:
        if options.figure not in known:
            raise ConfigError(f"no figure {options.figure!r}; known: {', '.join(known)}")
        path = known[options.figure]
        figure: FigureConfig = load_figure(path, variant, options.set)
        folder, complete = reproduce(figure, path, options.out, arguments=sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.copy_to is not None:
        options.copy_to.mkdir(parents=True, exist_ok=True)
        for name in _SMALL:
            shutil.copy(folder / name, options.copy_to)
    print(folder)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
