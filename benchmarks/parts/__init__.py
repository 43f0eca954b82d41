"""Parts of the benchmark of side-tuning: baselines, runs, cost measurements, the table."""
