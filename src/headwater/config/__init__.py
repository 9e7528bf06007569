"""Every option Headwater takes, a file for each group; `environment.py` is the only place that reads the environment.

Values are checked here, at the door: an option that cannot work raises InvalidConfig and says what to do.
"""
