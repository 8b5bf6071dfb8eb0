"""The store in this process: the engine on RocksDB and segment files, its writer thread, its folder."""
