import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import tokenmill.common.v1.Common.ErrorDetail;
import tokenmill.common.v1.Common.Sampling;
import tokenmill.inference.v1.InferenceGrpc;
import tokenmill.inference.v1.InferenceGrpc.InferenceBlockingStub;
import tokenmill.inference.v1.InferenceOuterClass.ChatRequest;
import tokenmill.inference.v1.InferenceOuterClass.GenerateResponse;
import tokenmill.inference.v1.InferenceOuterClass.ListModelsRequest;
import tokenmill.inference.v1.InferenceOuterClass.Message;
import tokenmill.inference.v1.InferenceOuterClass.Model;

/** Talks to Tokenmill over gRPC: lists models, streams a chat, cancels it, sets a deadline, reads error details. */
public final class Client {
  private static final String USAGE = """
      usage: client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] models
             client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] chat PROMPT
                    [--max-tokens N] [--cancel-after CHUNKS] [--deadline SECONDS]""";
  private static final Set<String> FLAGS =
      Set.of("--address", "--ca", "--key", "--max-tokens", "--cancel-after", "--deadline");
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

  /** The command line. What was not given is null. */
  private record Options(
      String address, boolean tls, String ca, String key, String prompt,
      Integer maxTokens, Integer cancelAfter, Double deadline) {

    static Options parse(String[] arguments) {
      Map<String, String> flags = new HashMap<>();
      List<String> words = new ArrayList<>();
      boolean tls = false;
      for (int i = 0; i < arguments.length; i++) {
        if (arguments[i].equals("--tls")) {
          tls = true;
        } else if (FLAGS.contains(arguments[i]) && i + 1 < arguments.length) {
          flags.put(arguments[i], arguments[++i]);
        } else if (arguments[i].startsWith("--")) {
          throw new IllegalArgumentException(arguments[i] + " is unknown, or its value is missing");
        } else {
          words.add(arguments[i]);
        }
      }
      if (!flags.containsKey("--address")) {
        throw new IllegalArgumentException("--address is missing");
      }
      boolean chat = words.size() == 2 && words.get(0).equals("chat");
      if (!chat && !words.equals(List.of("models"))) {
        throw new IllegalArgumentException("give models, or chat PROMPT");
      }
      String maxTokens = flags.get("--max-tokens");
      String cancelAfter = flags.get("--cancel-after");
      String deadline = flags.get("--deadline");
      return new Options(
          flags.get("--address"), tls, flags.get("--ca"), flags.get("--key"), chat ? words.get(1) : null,
          maxTokens == null ? null : Integer.valueOf(maxTokens),
          cancelAfter == null ? null : Integer.valueOf(cancelAfter),
          deadline == null ? null : Double.valueOf(deadline));
    }
  }

  public static void main(String[] arguments) throws IOException, InterruptedException {
    Options given;
    try {
      given = Options.parse(arguments);
    } catch (IllegalArgumentException error) {
      System.err.println(USAGE + "\nclient: " + error.getMessage());
      System.exit(2);
      return;
    }
    ManagedChannel channel = connect(given);
    try {
      InferenceBlockingStub inference = InferenceGrpc.newBlockingStub(channel);
      if (given.key != null) {
        Metadata metadata = new Metadata();
        metadata.put(AUTHORIZATION, "Bearer " + given.key);
        inference = inference.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata));
      }
      if (given.prompt == null) {
        listModels(inference);
      } else {
        chat(inference, given);
      }
    } catch (StatusRuntimeException error) {
      ErrorDetail detail = readDetails(error);
      System.err.printf(
          "error: code=%s param=%s: %s%n", detail.getCode(), detail.getParam(), error.getStatus().getDescription());
      System.exit(1);
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  private static ManagedChannel connect(Options given) throws IOException {
    if (!given.tls) {
      return Grpc.newChannelBuilder(given.address, InsecureChannelCredentials.create()).build();
    }
    TlsChannelCredentials.Builder trust = TlsChannelCredentials.newBuilder();
    if (given.ca != null) {
      trust.trustManager(new File(given.ca));
    }
    return Grpc.newChannelBuilder(given.address, trust.build()).build();
  }

  private static void listModels(InferenceBlockingStub inference) {
    for (Model model : inference.listModels(ListModelsRequest.getDefaultInstance()).getModelsList()) {
      System.out.printf("%s\t%d\t%d%n", model.getName(), model.getMaxModelLen(), model.getReadyWorkers());
    }
  }

  /** Prints the answer as it comes. The model is left open: the only one served. */
  private static void chat(InferenceBlockingStub stub, Options given) {
    Sampling.Builder sampling = Sampling.newBuilder().setTemperature(0);
    if (given.maxTokens != null) {
      sampling.setMaxTokens(given.maxTokens);
    }
    ChatRequest request = ChatRequest.newBuilder()
        .addMessages(Message.newBuilder().setRole("user").setContent(given.prompt))
        .setSampling(sampling)
        .build();
    InferenceBlockingStub inference = given.deadline == null
        ? stub
        : stub.withDeadlineAfter((long) (given.deadline * 1e9), TimeUnit.NANOSECONDS);
    // Cancelling its context is how a call of a blocking stub is ended; the server stops at once.
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      context.run(() -> print(inference.chat(request), given.cancelAfter));
    }
    System.out.println();
  }

  private static void print(Iterator<GenerateResponse> responses, Integer cancelAfter) {
    for (int chunks = 1; responses.hasNext(); chunks++) {
      GenerateResponse response = responses.next();
      System.out.print(response.getText());
      System.out.flush();
      if (response.hasUsage()) {
        String reason = response.getFinishReason().name().replace("FINISH_REASON_", "").toLowerCase(Locale.ROOT);
        System.err.printf("%nfinished: %s, %d tokens%n", reason, response.getUsage().getCompletionTokens());
      } else if (cancelAfter != null && chunks == cancelAfter) {
        System.err.printf("%ncancelled after %d chunks%n", chunks);
        return;
      }
    }
  }

  /** Our code and the field at fault; for a call that never reached Tokenmill, gRPC's own code. */
  private static ErrorDetail readDetails(StatusRuntimeException error) {
    byte[] details = error.getTrailers() == null ? null : error.getTrailers().get(DETAILS);
    if (details != null) {
      try {
        for (Any detail : com.google.rpc.Status.parseFrom(details).getDetailsList()) {
          if (detail.is(ErrorDetail.class)) {
            return detail.unpack(ErrorDetail.class);
          }
        }
      } catch (InvalidProtocolBufferException notOurs) {
        // Whoever sent this does not speak our error model; the status itself still tells what it was.
      }
    }
    return ErrorDetail.newBuilder().setCode(error.getStatus().getCode().name().toLowerCase(Locale.ROOT)).build();
  }
}
