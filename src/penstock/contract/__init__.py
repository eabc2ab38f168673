"""The contract: one struct per noun and one table of operations.

It lies below the engines. They return these structs, the HTTP API writes them, the client reads
them, and OpenAPI, the reference and the commands are derived from them.

| Module       | Content                                                              |
|--------------|----------------------------------------------------------------------|
| `noun`       | the base of the structs                                              |
| `operation`  | what an operation is: method, path, role, query, body, answer        |
| `operations` | the table of operations                                              |
| others       | the nouns, each in the module of its subject                         |

In Python a field is written in snake_case, in JSON in camelCase. One fact has one word:

| Word           | Fact                                                                       |
|----------------|----------------------------------------------------------------------------|
| `stored`       | messages that exist now                                                    |
| `waiting`      | messages that a group has not finished, those under a lease included       |
| `leased`       | messages that were delivered under a lease that is live                    |
| `completed`    | messages that were acknowledged with success                               |
| `failed`       | attempts that failed                                                       |
| `dead_letters` | messages that failed for good                                              |
| `lag`          | records of a topic that a group has not read; `lag_seconds` is an age      |

Queen MQ has other words for some of them. They are in `penstock.wire.queen` only.
"""
