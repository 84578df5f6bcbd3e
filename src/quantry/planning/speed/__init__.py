"""The predicted speed of a served model."""
