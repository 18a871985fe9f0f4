"""What came of a table's runs: measures, rows as CSV, order of methods, and the printed table."""
