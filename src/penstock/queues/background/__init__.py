"""Background loops of a broker: run schedules, apply retention, repair cursors, report that it is
alive. Every loop may run on any number of brokers at once.
"""
