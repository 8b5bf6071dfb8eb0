"""The API of the store for users and workers: clients, transactions, queues and leases."""
