"""The program of elastic_launch()'s workers: calls the function, and leaves its result or traceback in a folder."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing import spawn
from pathlib import Path


def main(folder: Path) -> None:
    own = f"{os.environ['MUSTER_GENERATION']}.{os.environ['RANK']}"
    (folder / f"started.{own}").touch()
    try:
        with (folder / "call").open("rb") as file:
            spawn.prepare(pickle.load(file))  # tidy: allow(pickle) from a folder that only this user can write
            entrypoint, args = pickle.load(file)  # tidy: allow(pickle) as above
        result = pickle.dumps(entrypoint(*args))
    except Exception as error:
        frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
        (folder / f"failure.{own}").write_text("".join(traceback.format_exception(type(error), error, frames)))
        raise
    (folder / f"result.{own}").write_bytes(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
