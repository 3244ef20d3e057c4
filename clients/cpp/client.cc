// Talks to Tokenmill over gRPC: lists models, streams a chat, cancels it, sets a deadline, reads error details.

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "google/rpc/status.pb.h"
#include "tokenmill/common/v1/common.pb.h"
#include "tokenmill/inference/v1/inference.grpc.pb.h"

namespace common = tokenmill::common::v1;
namespace inference = tokenmill::inference::v1;

namespace {

constexpr char kUsage[] =
    R"(usage: client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] models
       client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] chat PROMPT
              [--max-tokens N] [--cancel-after CHUNKS] [--deadline SECONDS])";

// The command line.
struct Options {
  std::string address, ca, key, command, prompt;
  bool tls = false;
  std::optional<std::uint32_t> max_tokens;
  std::optional<int> cancel_after;
  std::optional<double> deadline_s;
};

Options Parse(const std::vector<std::string>& arguments) {
  Options given;
  std::vector<std::string> words;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    auto value = [&] {
      if (++i == arguments.size()) throw std::invalid_argument(name + " needs a value");
      return arguments[i];
    };
    if (name == "--address") given.address = value();
    else if (name == "--tls") given.tls = true;
    else if (name == "--ca") given.ca = value();
    else if (name == "--key") given.key = value();
    else if (name == "--max-tokens") given.max_tokens = static_cast<std::uint32_t>(std::stoul(value()));
    else if (name == "--cancel-after") given.cancel_after = std::stoi(value());
    else if (name == "--deadline") given.deadline_s = std::stod(value());
    else if (name.rfind("--", 0) == 0) throw std::invalid_argument("unknown flag " + name);
    else words.push_back(name);
  }
  if (given.address.empty()) throw std::invalid_argument("--address is missing");
  if (words.size() == 1 && words[0] == "models") {
    given.command = words[0];
  } else if (words.size() == 2 && words[0] == "chat") {
    given.command = words[0];
    given.prompt = words[1];
  } else {
    throw std::invalid_argument("give models, or chat PROMPT");
  }
  return given;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<grpc::Channel> Connect(const Options& given) {
  if (!given.tls) return grpc::CreateChannel(given.address, grpc::InsecureChannelCredentials());
  grpc::SslCredentialsOptions trust;
  if (!given.ca.empty()) trust.pem_root_certs = ReadFile(given.ca);
  return grpc::CreateChannel(given.address, grpc::SslCredentials(trust));
}

grpc::Status ListModels(inference::Inference::Stub& stub, grpc::ClientContext& context) {
  inference::ListModelsResponse response;
  grpc::Status status = stub.ListModels(&context, {}, &response);
  for (const auto& model : response.models()) {
    std::cout << model.name() << '\t' << model.max_model_len() << '\t' << model.ready_workers() << '\n';
  }
  return status;
}

std::string LowerCase(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Prints the answer as it comes. The model is left open: the only one served.
grpc::Status Chat(inference::Inference::Stub& stub, grpc::ClientContext& context, const Options& given) {
  if (given.deadline_s) {
    const std::chrono::duration<double> time(*given.deadline_s);
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::system_clock::duration>(time));
  }
  inference::ChatRequest request;
  inference::Message* message = request.add_messages();
  message->set_role("user");
  message->set_content(given.prompt);
  request.mutable_sampling()->set_temperature(0);
  if (given.max_tokens) request.mutable_sampling()->set_max_tokens(*given.max_tokens);

  std::unique_ptr<grpc::ClientReader<inference::GenerateResponse>> stream = stub.Chat(&context, request);
  inference::GenerateResponse response;
  bool cancelled = false;
  for (int chunks = 1; !cancelled && stream->Read(&response); ++chunks) {
    std::cout << response.text() << std::flush;
    if (response.has_usage()) {
      const std::string reason = common::FinishReason_Name(response.finish_reason()).substr(sizeof("FINISH_REASON"));
      std::cerr << "\nfinished: " << LowerCase(reason) << ", " << response.usage().completion_tokens() << " tokens\n";
    } else if (given.cancel_after == chunks) {
      cancelled = true;
      context.TryCancel();  // the server stops at once
      std::cerr << "\ncancelled after " << chunks << " chunks\n";
    }
  }
  const grpc::Status status = stream->Finish();
  if (!cancelled && !status.ok()) return status;
  std::cout << '\n';
  return grpc::Status::OK;
}

std::string NameOf(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {
      "ok", "cancelled", "unknown", "invalid_argument", "deadline_exceeded", "not_found", "already_exists",
      "permission_denied", "resource_exhausted", "failed_precondition", "aborted", "out_of_range", "unimplemented",
      "internal", "unavailable", "data_loss", "unauthenticated"};
  return code >= 0 && code < static_cast<int>(std::size(kNames)) ? kNames[code] : "unknown";
}

// Our code and the field at fault; for a call that never reached Tokenmill, gRPC's own code.
std::pair<std::string, std::string> ReadDetails(const grpc::Status& status) {
  google::rpc::Status details;
  common::ErrorDetail ours;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details()) {
      if (detail.UnpackTo(&ours)) return {ours.code(), ours.param()};
    }
  }
  return {NameOf(status.error_code()), ""};
}

}  // namespace

int main(int argc, char** argv) {
  Options given;
  try {
    given = Parse({argv + 1, argv + argc});
  } catch (const std::logic_error& error) {
    std::cerr << kUsage << "\nclient: " << error.what() << '\n';
    return 2;
  }
  try {
    const std::unique_ptr<inference::Inference::Stub> stub = inference::Inference::NewStub(Connect(given));
    grpc::ClientContext context;
    if (!given.key.empty()) context.AddMetadata("authorization", "Bearer " + given.key);
    const grpc::Status status =
        given.command == "models" ? ListModels(*stub, context) : Chat(*stub, context, given);
    if (status.ok()) return 0;
    const auto [code, param] = ReadDetails(status);
    std::cerr << "error: code=" << code << " param=" << param << ": " << status.error_message() << '\n';
  } catch (const std::runtime_error& error) {
    std::cerr << "error: " << error.what() << '\n';
  }
  return 1;
}
