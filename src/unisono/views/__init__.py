"""A run as people and their tools see it: functions of the record."""
