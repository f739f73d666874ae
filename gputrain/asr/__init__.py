"""Speech recognition by CTC: wav2vec 2.0 and its multilingual models XLS-R and MMS."""
