# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: tables and dense parameters of a model, kept by processes of their own.

`ps` stores tables and dense parameters in servers. Workers and servers share pure data: `plan.py`
(tables, parameters and optimizers), `placement.py` (which server stores what), `messages.py`,
`update.py` (the gradients of a step), `changes.py` (the changes of a server's values),
`wire_forms.py` (the form in which rows of a table travel: sender and receiver call it for each
table, so that all other code has float32) and `high_water_marks.py` (a repeated push is applied
once). Its rooms: `server/`, `worker/`, `layers/` (modules of a model), `tables/`, `journal/`,
`rendezvous/` and `transport/`.
"""
