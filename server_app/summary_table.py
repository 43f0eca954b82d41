"""The small table at the end of a run."""

from collections.abc import Mapping
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The table, one string a line.

    Parameters
    ----------
    summary : Mapping
        What ``summary.json`` holds.
    """
    table = Table(title="Eco-MobiLLM", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("accuracy", "loss"):
        if summary.get(f"{name}_before") is not None and summary.get(f"{name}_after") is not None:
            before, after = summary[f"{name}_before"], summary[f"{name}_after"]
            table.add_row(f"{name} before -> after", f"{before:.3f} -> {after:.3f}")
    table.add_row("devices / samples", f"{summary['devices']} / {summary['samples']:,}")
    table.add_row("epochs / best epoch", f"{summary['epochs']} / {summary['best_epoch']}")
    if summary["forwarded_samples"]:
        table.add_row("bytes a sample", f"{summary['bytes_per_sample']:,.0f}")
        table.add_row("  against all tokens in fp16", f"{summary['bytes_per_sample_everything']:,.0f}")
    table.add_row("device seconds, all devices", f"{summary['device_seconds']:.1f}")
    table.add_row("samples forwarded on devices", f"{summary['forwarded_samples']:,}")
    table.add_row("device messages in stage two", str(summary["stage_two_device_messages"]))
    table.add_row("server seconds", f"{summary['server_seconds']:.1f}")
    text = StringIO()
    Console(file=text, width=78).print(table)
    return text.getvalue().rstrip().splitlines()
