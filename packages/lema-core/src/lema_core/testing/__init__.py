"""What plugin authors and this project's own tests inherit: a simulated accelerator and suites."""
