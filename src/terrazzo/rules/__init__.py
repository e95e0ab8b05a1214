"""The rules, one folder per arrow between two IRs, one topic per file. Each file ends with its RULES."""
