"""The worked pipeline of the examples, from its command to its verdict."""

from __future__ import annotations

from tests.spark.programs import PipelineRun


def test_pipeline_ends_with_the_verdict_and_leaves_nothing_behind(pipeline: PipelineRun) -> None:
    code, said = pipeline.wait()
    assert code == 0, said[-3000:]
    assert said.splitlines()[-1].startswith("exactly-once: OK rows=")
    assert not [entry for entry in pipeline.folder.iterdir() if entry.name.startswith("shuffle-spark-")]
