"""Read the TensorBoard event files that fairseq's --tensorboard-logdir wrote, with TensorBoard."""

from itertools import groupby
from pathlib import Path

from fairseq_tutel.tools.training_log import Entry, Log


def read_events(files: list[Path], given: Path) -> Log:
    """Return the records in event files; fairseq keeps those of each tag in a folder of its name.

    They are scalars only: the loads of experts, which are lists, are in fairseq's JSON log alone.

    Args:
        files: event files of one training.
        given: where the user said they are, for messages.

    Raises:
        ValueError: TensorBoard is not installed, or the files are of several trainings.
    """
    if not files:
        return Log()
    folders = {file.parent.name: file.parent for file in files}
    for file in files:
        if folders[file.parent.name] != file.parent:
            raise ValueError(
                f"{given} holds the TensorBoard files of several trainings ({file.parent}, "
                f"{folders[file.parent.name]}); name the folder of one of them."
            )
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ValueError(
            f"{given} holds TensorBoard event files, which need TensorBoard to be read; "
            "pip install tensorboard."
        ) from None
    events = []
    for file in files:
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0: all of them
        reader.Reload()
        for key in reader.Tags()["scalars"]:
            for event in reader.Scalars(key):
                events.append((event.wall_time, file.parent.name, event.step, key, event.value))
    # Several keys are one record, in the order in which the records of all tags were written.
    records = groupby(sorted(events), key=lambda event: event[1:3])
    return Log([Entry(tag, step, {e[3]: e[4] for e in of}) for (tag, step), of in records])
