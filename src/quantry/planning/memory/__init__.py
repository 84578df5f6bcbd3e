"""The memory of a served model, term by term."""
