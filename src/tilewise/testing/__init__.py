"""Named cases, inputs, the float64 oracle and the error budget: what the tests use and users may run too."""
