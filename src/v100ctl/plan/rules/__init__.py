"""Rules: can this host do what is asked of it?

Each rule is a generator over facts, configuration, model headers and catalog; it yields nothing where all is well. A rule's
reason has numbers in it, and one that refuses names the nearest thing that works. Ids are stable: they stand in JSON, in
documentation and in people's scripts.
"""
