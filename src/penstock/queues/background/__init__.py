"""What a broker does by itself: fire schedules, delete what retention allows, heal cursors, report
that it is alive. Every loop may run on any number of brokers at once.
"""
