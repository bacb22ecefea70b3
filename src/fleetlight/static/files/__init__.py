# SPDX-License-Identifier: Apache-2.0
"""Programs in files: a graph as JSON, its state as safetensors, no pickle.

`files/` saves and loads programs. `drawing/` draws them: `picture.py` is the content of a
picture, `writers.py` writes it as DOT and Mermaid, and Graphviz lays it out. `svg.py` lays it out
itself: worker 0 adds that to what it writes down of the job
(`fleet/recording/process_metrics.py`), for the live page.
"""
