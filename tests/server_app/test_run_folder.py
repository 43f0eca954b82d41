"""What a run writes, and how a stopped one is found again."""

import json

import pytest
from flower_plugin.server_app.run_folder import CONFIG, METRICS, open_run_folder

from flower_plugin.config import RunConfig
from flower_plugin.errors import ConfigError


def config(tmp_path, **changes):
    return RunConfig(backbone="x", output_dir=str(tmp_path / "runs"), **changes)


def test_every_event_is_on_disk_at_once(tmp_path):
    folder = open_run_folder(config(tmp_path), 1)
    folder.record("epoch", {"round": 1})
    assert json.loads((folder.path / METRICS).read_text())["event"] == "epoch"


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    folder = open_run_folder(config(tmp_path), 1)
    folder.record("epoch", {"round": 1})
    with (folder.path / METRICS).open("a") as file:
        file.write('{"event": "epo')
    assert [event["round"] for event in folder.events()] == [1]


def test_events_after_such_a_line_are_kept(tmp_path):
    folder = open_run_folder(config(tmp_path), 1)
    with (folder.path / METRICS).open("a") as file:
        file.write('{"event": "epo')
    folder.record("epoch", {"round": 2})
    assert [event["round"] for event in folder.events()] == [2]


def test_resume_finds_the_unfinished_run(tmp_path):
    finished, stopped = (open_run_folder(config(tmp_path), run_id) for run_id in (1, 2))
    finished.write_summary({})
    stopped.release()
    assert open_run_folder(config(tmp_path, resume=True, num_rounds=99), 3).path == stopped.path


def test_a_run_that_still_lives_is_not_resumed(tmp_path):
    living = open_run_folder(config(tmp_path), 1)
    with pytest.raises(ConfigError, match=f"{living.path.name} is still running"):
        open_run_folder(config(tmp_path, resume=True), 2)


def test_a_later_failed_start_does_not_hide_the_stopped_run(tmp_path):
    stopped = open_run_folder(config(tmp_path), 1)
    stopped.release()
    open_run_folder(config(tmp_path, codec="fp16"), 2).release()
    assert open_run_folder(config(tmp_path, resume=True), 3).path == stopped.path


def test_a_run_that_failed_before_anything_happened_leaves_no_folder(tmp_path):
    folder = open_run_folder(config(tmp_path), 1)
    folder.discard_if_empty()
    assert not folder.path.exists()


def test_nothing_to_resume_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no unfinished run that can go on; check"):
        open_run_folder(config(tmp_path, resume=True), 1)


def test_a_run_is_not_resumed_with_another_config(tmp_path):
    open_run_folder(config(tmp_path), 1)
    with pytest.raises(ConfigError, match=r"codec: 'int8' -> 'fp16'"):
        open_run_folder(config(tmp_path, resume=True, codec="fp16"), 2)


def test_a_damaged_config_of_a_stopped_run_is_named(tmp_path):
    folder = open_run_folder(config(tmp_path), 1)
    (folder.path / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match="run_config"):
        open_run_folder(config(tmp_path, resume=True), 2)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="output-dir"):
        open_run_folder(config(tmp_path), 1)
