"""What a model needs before it is there: shapes, memory, feasibility and speed, from headers and data alone."""
