"""The offsets in a checkpoint are read as Spark writes them."""

from __future__ import annotations

from pathlib import Path

from spark_hooks.publish.offsets import OffsetLog


def test_offsets_are_read_as_spark_writes_them(tmp_path: Path) -> None:
    folder = tmp_path / "a checkpoint" / "offsets"
    folder.mkdir(parents=True)
    (folder / "3").write_text('v1\n{"batchWatermarkMs":0}\n{"t":{"0":5}}\n-')
    (folder / "4").write_text('v2\n{}\nsource_1:{"t":{"0":5}}\nb:{"u":{"0":7}}')
    (folder / "5").write_text("")
    (folder / "7").write_text("v3\n{}\n{}")
    for location in (str(folder.parent), folder.parent.as_uri()):
        log = OffsetLog(location)
        assert log.ends_of(3) == ('{"t":{"0":5}}', "-")
        assert [log.ends_at(batch) for batch in (3, 5, 6)] == [False, True, False]
        assert log.ends_of(4) == ('source_1:{"t":{"0":5}}', 'b:{"u":{"0":7}}')
        assert [log.ends_of(batch) for batch in (5, 6, 7)] == [(), (), ()]
    assert OffsetLog(None).ends_of(3) == OffsetLog("s3://bucket/checkpoint").ends_of(3) == ()
