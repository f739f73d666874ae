"""`gputrain check-compatibility`: rules, trials and the report."""
