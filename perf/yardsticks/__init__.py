"""The systems that the project is measured against: Flight and RocksDB alone, Spark and Flink by themselves."""
