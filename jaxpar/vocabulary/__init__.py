"""The vocabulary split over tp: embedding, head and sampling, without gathering whole logits anywhere."""
