"""The exporter: carries rows that reducers have committed to an outbox queue to a place outside of the state store."""
