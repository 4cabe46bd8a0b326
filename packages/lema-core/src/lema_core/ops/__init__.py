"""Operations that model adapters compute with; weights are borrowed from a store inside them."""
