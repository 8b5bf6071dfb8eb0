"""The input ``kafka``: topics of Kafka, one mapper for each partition of them."""
