"""The weights of a model: in a table, in folders, in a checkpoint, and on their way to an engine.

table.py           rows of the weight table: one Megatron parameter and its Hugging Face tensors
stream.py          the parameters of a rank, and the streams for engines and folders
file_names.py      names and stacks of published files that differ from the table's
mxfp4.py           experts that files have in four bits
hf_folder.py       reads and writes the safetensors files of a Hugging Face folder
sharded_state.py   policy and optimizer as a distributed checkpoint
local_shards.py    each data-parallel rank's part of it
plain_data.py      reads its pickles without running code
"""
