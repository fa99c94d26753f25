"""The queries below a folder: checkpoints of their own, and those of the flows of a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backend.checkpoint import discovery
from state_backend.checkpoint.discovery import Flow, FoundQuery, queries_below
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.model.errors import CheckpointError


def make_files(folder: Path, *paths: str) -> CheckpointFiles:
    """Make folders; a path that ends with a number of commits in brackets is a checkpoint with them."""
    for path in paths:
        name, _, commits = path.rstrip("]").partition("[")
        (folder / name).mkdir(parents=True)
        if commits:
            for each in ("offsets", "commits"):
                (folder / name / each).mkdir()
            for batch in range(int(commits)):
                (folder / name / f"commits/{batch}").touch()
    return CheckpointFiles.at(str(folder))


def checkpoints_below(folder: Path, *paths: str) -> list[str]:
    return [query.checkpoint for query in queries_below(make_files(folder, *paths))]


@pytest.mark.parametrize(
    ("location", "flow"),
    [
        ("/p/_checkpoints/cat/db/t/t/0", Flow("cat", "db", "t", "t")),
        ("s3://b/_checkpoints/cat/db/t/more/12/", Flow("cat", "db", "t", "more")),
        ("hdfs://h/_checkpoints/cat/a/b/t/t/1", Flow("cat.a", "b", "t", "t")),
        ("/p/_checkpoints/db/t/t/0", Flow("db", "db", "t", "t")),
        ("/p/_checkpoints/out/f/0", Flow("sink", "sink", "out", "f")),
        ("/p/_checkpoints/x/_checkpoints/out/f/0", Flow("sink", "sink", "out", "f")),
        ("/p/_checkpoints/out/to%20the%20north/0", Flow("sink", "sink", "out", "to the north")),
        ("/p/_checkpoints/out/f", None),
        ("/p/_checkpoints/out/0", None),
        ("/p/_checkpoints/0", None),
        ("/p/_checkpoints", None),
        ("/p/checkpoints/cat/db/t/t/0", None),
    ],
)
def test_flow_has_its_names_from_path_of_its_checkpoint(location: str, flow: Flow | None) -> None:
    assert Flow.of(location) == flow


def test_query_before_its_first_commit_is_found_where_folders_are_names_of_files(tmp_path: Path) -> None:
    make_files(tmp_path, "a/offsets", "a/state", "b/offsets", "b/sources", "c/offsets/q[1]")
    assert checkpoints_below(tmp_path) == ["a", "b", "c/offsets/q"]


def test_queries_are_found_at_any_depth(tmp_path: Path) -> None:
    assert checkpoints_below(tmp_path, "a[1]", "b/c/d[0]", "2[1]", "1[1]", "empty/x") == ["1", "2", "a", "b/c/d"]


def test_last_number_of_flow_with_commit_is_its_checkpoint(tmp_path: Path) -> None:
    flow = "s/_checkpoints/cat/db/t/t"
    files = make_files(tmp_path, f"{flow}/0[3]", f"{flow}/9[1]", f"{flow}/10[2]", f"{flow}/11[0]")
    assert queries_below(files) == [FoundQuery(flow, f"{flow}/10")]
    (tmp_path / flow / "11/commits/0").touch()
    assert queries_below(files) == [FoundQuery(flow, f"{flow}/11")]
    assert queries_below(CheckpointFiles.at(str(tmp_path / flow))) == [FoundQuery(".", "11")]


def test_newest_number_counts_if_none_has_commit(tmp_path: Path) -> None:
    flow = "_checkpoints/out/f"
    assert checkpoints_below(tmp_path, f"{flow}/0[0]", f"{flow}/1[0]") == [f"{flow}/1"]


def test_folders_without_checkpoints_are_not_searched(tmp_path: Path) -> None:
    inside = (".hidden", "_delta_log", "day=1", "log/job")
    (tmp_path / "log/job/terms").mkdir(parents=True)
    make_files(tmp_path, *(f"{each}/q[1]" for each in inside), "_checkpoints/q[1]")
    (tmp_path / "q[1]").write_text("a file")
    assert checkpoints_below(tmp_path) == ["_checkpoints/q"]
    assert checkpoints_below(tmp_path / "nothing") == []


def test_folders_are_searched_to_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FOLDERS_MAX", 3)
    files = make_files(tmp_path, "a", "b", "c")
    with pytest.raises(CheckpointError, match="has more than 3 folders"):
        queries_below(files)
    monkeypatch.undo()
    monkeypatch.setattr(discovery, "DEPTH_MAX", 2)
    assert checkpoints_below(tmp_path / "d", "1/2/3[1]") == ["1/2/3"]
    assert checkpoints_below(tmp_path / "e", "1/2/3/4[1]") == []
