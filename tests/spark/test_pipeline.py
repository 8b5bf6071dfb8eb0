"""The worked pipeline of the examples, from its command to its verdict."""

from __future__ import annotations

from pathlib import Path

from tests.spark.programs import PipelineRun


def test_pipeline_ends_with_the_verdict_and_leaves_nothing_behind(pipeline: Path) -> None:
    code, said = PipelineRun.result(pipeline)
    assert code == 0, said[-3000:]
    assert said.splitlines()[-1].startswith("exactly-once: OK rows=")
    assert not [entry for entry in pipeline.iterdir() if entry.name.startswith("shuffle-spark-")]
