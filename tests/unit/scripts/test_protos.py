from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool

from scripts.protos import write_descriptors


def test_the_descriptor_set_is_whole_and_carries_the_comments(tmp_path: Path) -> None:
    write_descriptors(tmp_path / "dist" / "tokenmill.binpb")
    described = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "dist" / "tokenmill.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in described.file:  # imports come before those that import them
        pool.Add(file)
    assert pool.FindServiceByName("tokenmill.inference.v1.Inference").methods_by_name["Chat"]
    comments = [one.leading_comments for file in described.file for one in file.source_code_info.location]
    assert any("Empty: the only model served." in comment for comment in comments)
