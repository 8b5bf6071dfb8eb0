"""What the project is measured against: bare Flight and RocksDB, Spark and Flink by themselves."""
