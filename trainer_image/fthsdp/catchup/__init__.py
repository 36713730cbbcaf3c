"""How a replica without state gets that of the others: snapshots of a boundary, downloaded in stripes, then replayed.

``values`` turns optimizer, scheduler and user state into JSON and a list of tensors, without pickle; ``snapshot`` lays
the tensors out as one run of bytes that donors copy in stripes and a joiner puts together again. ``shelf`` is where a
rank keeps what others fetch, ``download`` fetches all stripes at once. ``protocol.catchup`` keeps and
replays what was trained meanwhile.
"""
