"""A step of a serving engine: the queries of many requests against their caches in one launch or two, and what it takes."""
