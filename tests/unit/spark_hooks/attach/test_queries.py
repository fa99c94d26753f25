"""The names of the jobs of `sparkis attach --checkpoint PATH`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from spark_hooks.attach.queries import Source, check_jobs, sources_of
from spark_hooks.cli import COMMANDS
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.model.errors import CheckpointError, DescriptorError


def parse(*words: object) -> argparse.Namespace:
    (command,) = (each for each in COMMANDS if each.name == "attach")
    return command.parser().parse_args([str(word) for word in words])


def sources(*words: object) -> list[Source]:
    return sources_of(parse(*words), CheckpointFiles.at)


def jobs(*words: object) -> list[str]:
    return [source.job_of(query) for source in sources(*words) for query in source.queries()]


def make(folder: Path, *paths: str) -> Path:
    for path in paths:
        for each in ("offsets", "commits"):
            (folder / path / each).mkdir(parents=True)
    return folder


def test_checkpoint_is_job_with_name_of_its_folder(tmp_path: Path) -> None:
    make(tmp_path, "one", "two", "x y", "d/one")
    one, two, other = tmp_path / "one", f"{tmp_path}/two/", tmp_path / "d/one"
    assert jobs("--checkpoint", one, "--checkpoint", two) == ["one", "two"]
    assert jobs("--checkpoint", one, "--job", "a", "--checkpoint", other, "--job", "b") == ["a", "b"]
    assert jobs("--checkpoint", one, "--job", "a.<name>") == ["a.one"]
    with pytest.raises(DescriptorError, match="2 checkpoints and 1 jobs"):
        sources("--job", "a", "--checkpoint", one, "--checkpoint", other)
    with pytest.raises(DescriptorError, match="'x y' cannot be the job's name"):
        jobs("--checkpoint", tmp_path / "x y")
    with pytest.raises(DescriptorError, match=f"{one} and {other} would both be job 'one'"):
        check_jobs(sources("--checkpoint", one, "--checkpoint", other))


def test_query_that_has_not_begun_batch_is_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    with pytest.raises(CheckpointError, match="it is empty, or does not exist; and no query is below it: a query's "):
        sources("--checkpoint", tmp_path / "q")
    (tmp_path / "q/metadata").touch()
    assert jobs("--checkpoint", tmp_path / "q") == ["q"]
    with pytest.raises(CheckpointError, match="it has no file `metadata`; and no query is below it"):
        sources("--checkpoint", tmp_path)


def test_queries_below_folder_have_names_of_their_paths(tmp_path: Path) -> None:
    make(tmp_path, "one", "team/two", "x y/three:4")
    assert jobs("--checkpoint", tmp_path) == ["one", "team.two", "x_y.three_4"]
    assert jobs("--checkpoint", tmp_path, "--job", "prod-<name>")[:2] == ["prod-one", "prod-team.two"]


def test_flows_are_named_by_their_tables(tmp_path: Path) -> None:
    tables = ("cat/db/orders/orders", "cat/db/orders/more", "cat/db/per city/per city", "out/alerts")
    make(tmp_path, *(f"s/_checkpoints/{table}/0" for table in tables))
    found = ["orders.more", "orders", "per_city", "out.alerts"]
    assert jobs("--checkpoint", tmp_path / "s") == found
    assert jobs("--checkpoint", tmp_path) == found
    assert jobs("--checkpoint", tmp_path / "s/_checkpoints/cat/db/orders") == found[:2]
    assert jobs("--checkpoint", tmp_path / "s/_checkpoints/cat/db/orders/more/0") == ["orders.more"]
    texts = {
        "<schema>.<name>": ["db.orders.more", "db.orders", "db.per_city", "sink.out.alerts"],
        "<catalog>-<table>-<flow>": [
            "cat-orders-more",
            "cat-orders-orders",
            "cat-per_city-per_city",
            "sink-out-alerts",
        ],
    }
    for text, expected in texts.items():
        assert jobs("--checkpoint", tmp_path, "--job", text) == expected


def test_clash_names_both_checkpoints_and_remedy(tmp_path: Path) -> None:
    first, second = (f"_checkpoints/cat/{schema}/t/t/0" for schema in ("a", "b"))
    make(tmp_path, first, second)
    with pytest.raises(DescriptorError) as raised:
        check_jobs(sources("--checkpoint", tmp_path))
    assert str(raised.value).startswith(f"{tmp_path}/{first} and {tmp_path}/{second} would both be job 't': ")
    assert "'<schema>.<name>'" in str(raised.value)
    check_jobs(sources("--checkpoint", tmp_path, "--job", "<schema>.<name>"))


@pytest.mark.parametrize(
    ("path", "job", "error"),
    [
        ("a/q", "<schema>.<name>", "--job '<schema>.<name>': <schema> is not known of 'a.q'; known are <name>"),
        ("a/q", "<what>", "<what> is not known"),
        ("a/q", "x:<name>", "the job name 'x:a.q' may not contain"),
        ("q" * 250, None, "has 250 bytes in UTF-8; at most 200"),
    ],
)
def test_mistake_in_name_is_error(tmp_path: Path, path: str, job: str | None, error: str) -> None:
    words = () if job is None else ("--job", job)
    with pytest.raises(DescriptorError, match=error):
        jobs("--checkpoint", make(tmp_path, path), *words)
