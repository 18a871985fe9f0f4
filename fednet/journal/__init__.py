"""What happens to a run's bytes and replies, as a list of events, and the books that follow from
it.

    events    what can happen
    book      what follows from the events: open accounts, accepted replies, rows of wire.jsonl
    rows      messages that are alike as one row of wire.jsonl
    file      the events on disk: the only log of a server that the next one goes on from
    journal   records each event in both

Both sides of a connection have a journal; only the server's has a file. Read them in this order.
"""
