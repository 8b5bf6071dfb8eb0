"""What a user of Spark Connect does; run by ``test_connect`` as a process of its own, as such a user has it.

python connect_client.py URL STATE_ADDRESS SPEC FOLDER
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

from shuffle.spark_connector import reduce_stream


def main() -> None:
    url, state, spec, folder = sys.argv[1:]
    spark = SparkSession.builder.remote(url).getOrCreate()
    numbers = spark.range(100).selectExpr("id k", "cast(id as string) v")
    numbers.write.format("shuffle").options(state=state, table="connected", key="k").mode("append").save()
    numbers.write.format("shuffle").options(state=state, queue="connected-rows", partitions=2).mode("append").save()
    batch = [
        spark.read.format("shuffle").options(**{"state": state, kind: name}).load().where("k >= 40").count()
        for kind, name in (("table", "connected"), ("queue", "connected-rows"))
    ]
    query = reduce_stream(spark, spec, f"{folder}/reduce", trigger={"availableNow": True})
    query.awaitTermination()
    print(json.dumps({"connect": type(spark).__module__, "batch": batch, "progress": query.lastProgress is not None}))


if __name__ == "__main__":
    main()
