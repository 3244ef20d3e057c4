// Talks to Tokenmill over gRPC: lists models, streams a chat, cancels it, sets a deadline, reads error details.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	commonv1 "tokenmill-client/build/gen/tokenmill/common/v1"
	inferencev1 "tokenmill-client/build/gen/tokenmill/inference/v1"
)

const usage = `usage: client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] models
       client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] chat PROMPT
              [--max-tokens N] [--cancel-after CHUNKS] [--deadline SECONDS]`

// options is the command line.
type options struct {
	address, ca, key       string
	tls                    bool
	command, prompt        string
	maxTokens, cancelAfter int // -1: not given
	deadline               float64
}

func main() {
	given, err := parse(os.Args[1:])
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s\nclient: %v\n", usage, err)
		os.Exit(2)
	}
	if err := run(given); err != nil {
		code, param := readDetails(err)
		fmt.Fprintf(os.Stderr, "error: code=%s param=%s: %s\n", code, param, status.Convert(err).Message())
		os.Exit(1)
	}
}

func parse(arguments []string) (given options, err error) {
	global := flag.NewFlagSet("client", flag.ContinueOnError)
	global.SetOutput(io.Discard)
	global.StringVar(&given.address, "address", "", "")
	global.BoolVar(&given.tls, "tls", false, "")
	global.StringVar(&given.ca, "ca", "", "")
	global.StringVar(&given.key, "key", "", "")
	if err := global.Parse(arguments); err != nil {
		return given, err
	}
	if given.address == "" {
		return given, errors.New("--address is missing")
	}
	given.command = global.Arg(0)
	switch {
	case given.command == "models" && global.NArg() == 1:
		return given, nil
	case given.command == "chat" && global.NArg() >= 2:
		given.prompt = global.Arg(1)
	default:
		return given, errors.New("give models, or chat PROMPT")
	}
	chat := flag.NewFlagSet("chat", flag.ContinueOnError)
	chat.SetOutput(io.Discard)
	chat.IntVar(&given.maxTokens, "max-tokens", -1, "")
	chat.IntVar(&given.cancelAfter, "cancel-after", -1, "")
	chat.Float64Var(&given.deadline, "deadline", 0, "")
	return given, chat.Parse(global.Args()[2:])
}

func run(given options) error {
	security := grpc.WithInsecure()
	if given.tls {
		transport := credentials.NewTLS(&tls.Config{})
		if given.ca != "" {
			var err error
			if transport, err = credentials.NewClientTLSFromFile(given.ca, ""); err != nil {
				return err
			}
		}
		security = grpc.WithTransportCredentials(transport)
	}
	connection, err := grpc.Dial(given.address, security)
	if err != nil {
		return err
	}
	defer connection.Close()
	client := inferencev1.NewInferenceClient(connection)

	// Cancelling the context is how a call is ended; the server stops at once.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if given.key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+given.key)
	}
	if given.command == "models" {
		return listModels(ctx, client)
	}
	if given.deadline > 0 {
		var release context.CancelFunc
		ctx, release = context.WithTimeout(ctx, time.Duration(given.deadline*float64(time.Second)))
		defer release()
	}
	return chat(ctx, cancel, client, given)
}

func listModels(ctx context.Context, client inferencev1.InferenceClient) error {
	response, err := client.ListModels(ctx, &inferencev1.ListModelsRequest{})
	for _, model := range response.GetModels() {
		fmt.Printf("%s\t%d\t%d\n", model.Name, model.MaxModelLen, model.ReadyWorkers)
	}
	return err
}

// chat prints the answer as it comes. The model is left open: the only one served.
func chat(ctx context.Context, cancel func(), client inferencev1.InferenceClient, given options) error {
	temperature := float32(0)
	sampling := &commonv1.Sampling{Temperature: &temperature}
	if given.maxTokens >= 0 {
		most := uint32(given.maxTokens)
		sampling.MaxTokens = &most
	}
	stream, err := client.Chat(ctx, &inferencev1.ChatRequest{
		Messages: []*inferencev1.Message{{Role: "user", Content: given.prompt}},
		Sampling: sampling,
	})
	if err != nil {
		return err
	}
	for chunks := 1; ; chunks++ {
		response, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		fmt.Print(response.Text)
		if response.Usage != nil {
			reason := strings.ToLower(strings.TrimPrefix(response.FinishReason.String(), "FINISH_REASON_"))
			fmt.Fprintf(os.Stderr, "\nfinished: %s, %d tokens\n", reason, response.Usage.CompletionTokens)
		} else if chunks == given.cancelAfter {
			cancel()
			fmt.Fprintf(os.Stderr, "\ncancelled after %d chunks\n", chunks)
			break
		}
	}
	fmt.Println()
	return nil
}

var wordStart = regexp.MustCompile("([a-z])([A-Z])")

// readDetails tells our code and the field at fault; for a call that never reached Tokenmill, gRPC's own code.
func readDetails(err error) (code, param string) {
	failed := status.Convert(err)
	for _, detail := range failed.Details() {
		if ours, ok := detail.(*commonv1.ErrorDetail); ok {
			return ours.Code, ours.Param
		}
	}
	// DeadlineExceeded, as Go spells it, is deadline_exceeded elsewhere.
	return strings.ToLower(wordStart.ReplaceAllString(failed.Code().String(), "${1}_${2}")), ""
}
