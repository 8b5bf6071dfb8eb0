"""What users and workers hold in their hands: clients, transactions, queues and leases."""
