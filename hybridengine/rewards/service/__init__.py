"""Worker processes that score: bounded in time and memory, killable, replaced when they die."""
