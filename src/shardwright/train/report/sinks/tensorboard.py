"""The sink for TensorBoard: event files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwright.train.config.catalog.records import RunEnd, StepRecord, scalars
from shardwright.train.config.catalog.sinks import RunSite
from shardwright.train.run.writing import writing


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, path: Path, steps_done: int, every: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # this import takes a second

        self.path, self.every = path, every
        self.make_writer = SummaryWriter
        with writing(path):
            # An attempt that began with step 1, too, may have left some.
            has_steps = steps_done or any(path.glob("events*"))
            self.writer = SummaryWriter(str(path), purge_step=steps_done + 1 if has_steps else None)

    def step(self, record: StepRecord) -> None:
        with writing(self.path):
            for name, value in scalars(record, self.every).items():
                self.writer.add_scalar(name, value, record.step)

    def rewind(self, step: int) -> None:
        with writing(self.path):
            self.writer.close()
            self.writer = self.make_writer(str(self.path), purge_step=step + 1)

    def say(self, text: str) -> None:
        pass

    def close(self, end: RunEnd) -> None:
        with writing(self.path):
            if end.picture is not None:
                from matplotlib.image import imread

                # Without the transparency, which TensorBoard's encoder does not take.
                self.writer.add_image("loss/curve", imread(end.picture)[..., :3], end.step, dataformats="HWC")
            self.writer.close()


def write_scalars(path: Path, values: Mapping[str, float], step: int) -> None:
    """Write figures of a step into a folder that no run writes to.

    TensorBoard reads no older file of a folder once it has a newer one, so a run would seem to end.
    """
    from torch.utils.tensorboard import SummaryWriter

    with writing(path), SummaryWriter(str(path)) as writer:
        for name, value in values.items():
            writer.add_scalar(name, value, step)


def open_sink(site: RunSite) -> TensorBoard:
    return TensorBoard(site.folder / "tensorboard", site.steps_done, site.config.log.every)
