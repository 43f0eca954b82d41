"""The ServerApp: run config in, strategy run, outputs out."""

from logging import ERROR, INFO
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from flower_plugin.config import parse_run_config
from flower_plugin.errors import FlowerPluginError
from flower_plugin.references import load_object
from flower_plugin.version import VERSION

from .run_folder import RunFolder, open_run_folder
from .summary_table import summary_lines

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Validate the run config, run the strategy it names, and write what came out."""
    log(INFO, "flower-plugin %s", VERSION)
    try:
        run(grid, context)
    except FlowerPluginError as error:
        log(ERROR, "%s: %s", type(error).__name__, error)
        raise


def run(grid: Grid, context: Context) -> RunFolder:
    """One run, from config to outputs.

    Raises
    ------
    FlowerPluginError
        The config is wrong (before any device is asked), or the run cannot go on.
    """
    config = parse_run_config(context.run_config)
    make_strategy = load_object(config.strategy, "strategy")
    folder = open_run_folder(config, context.run_id)
    log(INFO, "This run writes to %s", folder.path)
    strategy = make_strategy(config, folder=folder.path, observe=folder.record)
    if config.resume:
        strategy.recall(folder.events())
    try:
        strategy.start(grid)
    except FlowerPluginError:
        folder.discard_if_empty()
        raise
    write_outputs(strategy, folder)
    return folder


def write_outputs(strategy: Any, folder: RunFolder) -> None:
    """Side networks, pictures, summary and the table at the end."""
    from .pictures import draw_pictures

    summary = strategy.report()
    networks = strategy.export(folder.path / "side_networks")
    draw_pictures(folder.path, folder.events(), summary)
    folder.write_summary(summary)
    for line in summary_lines(summary):
        log(INFO, "%s", line)
    log(INFO, "Side network: %s", networks[0] if len(networks) == 1 else networks[0].parent)
