"""How many micro-batches a stage holds for their backward pass at once."""

SCHEDULES = ("gpipe", "1f1b")


def in_flight(kind: str, num_stages: int, stage: int, micro_batches: int) -> int:
    """Return the most micro-batches whose activations stage ``stage`` of ``num_stages`` keeps at once.

    GPipe keeps all of a step. In 1F1B a stage keeps one for itself and one for each hop that a micro-batch makes
    after it; the head, on the phone that owns the micro-batch, is one hop more than in a pipeline whose last stage
    has the loss.

    Raises
    ------
    ValueError
        The schedule is unknown, or the stage or the number of micro-batches is out of range.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is unknown: give one of {', '.join(SCHEDULES)}")
    if not 0 <= stage < num_stages or micro_batches < 1:
        raise ValueError(f"stage {stage} of {num_stages} with {micro_batches} micro-batches does not exist")
    return micro_batches if kind == "gpipe" else min(micro_batches, num_stages - stage + 1)
